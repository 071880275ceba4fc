"""Installed as `aviso_workers.shipped`: `aviso-workers config files` prints what is here."""
