"""Lossless and good enough: what a feature does to the model's answers, measured against a reference and held against bounds.

``gate/quality`` holds the data: features with their bounds, models, texts, amounts. ``run`` measures what is asked for and gives a
``Report``; every single measurement is kept in the cache by engine, model, flags and request, so a second run takes seconds.
"""

from .gate import Report, load, run
from .plan import Plan
from .report import page, show, write
from .verdict import Outcome, Result

__all__ = ["Outcome", "Plan", "Report", "Result", "load", "page", "run", "show", "write"]
