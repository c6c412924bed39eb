"""Similarity, bipartition and averaging on masked rows; numpy and torch backends."""
