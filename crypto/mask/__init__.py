"""The secret orthonormal mask. Devices and the owner only: no server code may import this package."""
