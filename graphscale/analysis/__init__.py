"""The analysis of training graphs: degrees, places, gradients, updates."""
