"""edge_client.storage."""
