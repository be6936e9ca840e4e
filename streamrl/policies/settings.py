"""Instances are set in ``[run]`` and ``[ingest]``, whose keys are the core's."""

from streamrl.schemas.settings import Section

SECTIONS: dict[str, type[Section]] = {}
