"""Where batches are computed: processes on this machine, or actors of a Ray cluster."""
