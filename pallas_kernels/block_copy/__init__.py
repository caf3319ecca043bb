"""Copies of whole blocks inside the pool, for copy-on-write."""
