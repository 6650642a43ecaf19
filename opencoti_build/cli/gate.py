"""``invoke gate``: what a patch, and a release, has to prove."""

from __future__ import annotations

from invoke import Collection

from .gate_models import models
from .gate_off import off
from .gate_quality import quality
from .gate_sanitize import sanitize
from .gate_series import series
from .gate_upstream import upstream

ns = Collection("gate", models, off, quality, sanitize, series, upstream)
