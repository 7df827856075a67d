"""Deployments on this machine: what `up`, `down` and `status` stand on."""
