"""Launchers for several processes: on this machine, with Ray, or with any scheduler that sets TF_CONFIG."""
