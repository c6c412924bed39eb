"""The experiments of the papers: their data, their splits, and one module a family of tables and figures."""
