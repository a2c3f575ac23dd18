"""Brings the workers of a job together where no horovodrun does: under srun, mpirun, Kubernetes."""
