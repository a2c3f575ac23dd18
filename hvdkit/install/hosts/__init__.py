"""What `hvdkit doctor --hosts` does: examine all hosts of a job before it is started."""
