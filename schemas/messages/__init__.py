"""Every message that crosses a process border, as frozen pydantic models."""
