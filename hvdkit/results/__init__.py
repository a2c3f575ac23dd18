"""What a measurement means: statistics, and the machine that it was taken on."""
