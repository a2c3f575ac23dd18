"""Benchmark drivers; each writes raw samples and says what they were measured on."""
