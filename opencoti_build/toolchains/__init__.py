"""Toolchains: zig (default), native, cosmocc. ``named`` makes one from the pins."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UsageError
from ..vendors import Fetcher, Pin
from . import native
from .base import Setup, Target, Toolchain, ToolSource, load_targets, machine_target, pinned_tool, target_named
from .native import NativeToolchain
from .zig import ZigToolchain

__all__ = ["NAMES", "NativeToolchain", "Setup", "Target", "ToolSource", "Toolchain", "ZigToolchain", "load_targets", "machine_target", "named", "target_named"]

NAMES = ("zig", "native", "native-portable", "native-openmp", "native-portable-openmp", "cosmocc")


def named(name: str, fetcher: Fetcher, pins: Mapping[str, Pin]) -> Toolchain:
    """The toolchain of that name; nothing is fetched yet. Raises UsageError for an unknown name."""
    cmake, ninja = pinned_tool(fetcher, pins, "cmake", "cmake"), pinned_tool(fetcher, pins, "ninja", "ninja")
    if name == "zig":
        return ZigToolchain(pinned_tool(fetcher, pins, "ziglang", "zig"), cmake, ninja)
    if (options := native.parse_name(name)) is not None:
        return NativeToolchain(fetcher.runner, cmake, ninja, **options)
    if name == "cosmocc":
        from .cosmocc import CosmoccToolchain

        return CosmoccToolchain.from_pins(fetcher, pins, cmake, ninja)
    raise UsageError(f"There is no toolchain {name!r}; known are {', '.join(NAMES)}.")
