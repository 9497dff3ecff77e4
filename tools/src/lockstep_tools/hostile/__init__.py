"""Clients that mean harm: what they send, and what well-behaved clients notice of it meanwhile."""
