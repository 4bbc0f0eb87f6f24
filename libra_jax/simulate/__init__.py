"""The cluster model: what a training step takes under Libra and under other systems, before a cluster is booked."""
