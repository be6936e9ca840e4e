from tests.architecture.readme_tree import README, with_tree


def test_the_readme_shows_every_file_with_its_own_first_sentence() -> None:
    readme = README.read_text()
    assert readme == with_tree(readme), "run python -m tests.architecture.readme_tree"


def test_the_first_screen_shows_both_commands() -> None:
    first_screen = "\n".join(README.read_text().splitlines()[:45])
    assert "make demo" in first_screen
    assert "make test" in first_screen
