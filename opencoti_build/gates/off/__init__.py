"""Off means off: without a flag of the series, graphs, inputs, logits, states, memory and defaults are those of the base."""

from .compare import TITLES, Finding
from .gate import ModelReport, Off, Report, Subject, summary
from .matrix import Configuration, Matrix, wishes
from .models import subjects
from .probe import Probe, build

__all__ = [
    "TITLES",
    "Configuration",
    "Finding",
    "Matrix",
    "ModelReport",
    "Off",
    "Probe",
    "Report",
    "Subject",
    "build",
    "subjects",
    "summary",
    "wishes",
]
