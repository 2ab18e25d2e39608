"""The kernel that quantizes rows and packs their codes."""
