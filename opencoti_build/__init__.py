"""The library behind ``invoke``: pins, patches, builds, packs and proves opencoti-llamafile."""
