"""What performance claims are made of; each module is one measurement with its limit."""
