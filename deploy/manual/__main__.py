"""``python -m deploy.manual`` writes the generated pages into docs/; run it after a setting or a topic changed."""

from pathlib import Path

from deploy.manual.settings_page import settings_page
from deploy.manual.topics_page import topics_page

DOCS = Path("docs")


def main() -> None:
    """Write what differs, and say so."""
    for name, page in (("settings.md", settings_page), ("topics.md", topics_page)):
        path, text = DOCS / name, page()
        stale = not path.exists() or path.read_text() != text
        if stale:
            path.write_text(text)
        print(f"{path}: {'written' if stale else 'was up to date'}")


if __name__ == "__main__":
    main()
