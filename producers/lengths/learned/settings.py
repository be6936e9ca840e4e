"""Learned predictors are set in ``[lengths]``, whose keys are the core's."""

from streamrl.schemas.settings import Section

SECTIONS: dict[str, type[Section]] = {}
