"""The device: torch-free scoring and training, masking, sealing, and a resumable agent."""
