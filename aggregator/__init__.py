"""The server: groups devices and averages their masked updates without being able to read them."""
