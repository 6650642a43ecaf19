"""``invoke gate``: what a patch, and a release, has to prove."""

from __future__ import annotations

from invoke import Collection

from .gate_series import series

ns = Collection("gate", series)
