"""edge_client.protocol."""
