"""edge_client.learning."""
