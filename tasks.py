"""The tasks of ``invoke``; thin: each parses, calls ``opencoti_build`` and prints. ``invoke --list`` shows them all."""

from importlib import import_module

from invoke import Collection

from opencoti_build.cli.spaced import add_group, install

install()
ns = Collection()
for group in ("vendor", "patches", "component", "gate", "verify", "pin"):
    add_group(ns, import_module(f"opencoti_build.cli.{group}").ns)
for module, name in (("build", "build"), ("publish", "publish"), ("doctor", "doctor")):
    ns.add_task(getattr(import_module(f"opencoti_build.cli.{module}"), name))
