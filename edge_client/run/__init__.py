"""edge_client.run."""
