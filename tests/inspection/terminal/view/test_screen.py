"""The application under Textual's pilot, over a made-up run: what it shows, its keys, its sizes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from streamrl.inspection.terminal import app as screen
from streamrl.inspection.terminal.app import INTERRUPTED, TABS, Help, Panel, TopApp
from streamrl.observability.run_state import snapshot
from streamrl.observability.run_state.pace import OFTEN_S
from streamrl.observability.run_state.parts import Section
from streamrl.observability.run_state.state import RunState
from streamrl.settings.features import feature_sections, run_parts
from tests.inspection.terminal.made_up_state import RUN, MadeUpState

SIZES = [(80, 24), (120, 30), (240, 70)]


@asynccontextmanager
async def shown(run: MadeUpState, size: tuple[int, int] = (160, 50)) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """Its own ticks are stopped, so that a test says when it looks."""
    app = TopApp(run.state, run.read, f"runs/{RUN}", run.clock)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield app, pilot


def text_of(app: TopApp) -> str:
    """What stands on the screen."""
    width, height = app.size
    strips = [app.screen._compositor.render_strips()[y] for y in range(height)]
    return "\n".join(strip.text[:width] for strip in strips)


@pytest.fixture(scope="module")
def run() -> MadeUpState:
    return MadeUpState(45.0)


async def test_every_panel_shows_its_figures(run: MadeUpState) -> None:
    state = run.state
    async with shown(run) as (app, pilot):
        seen = {}
        for number, tab in enumerate(TABS, 1):
            await pilot.press(str(number))
            await pilot.pause(0.1)
            seen[tab] = text_of(app)
    loop = seen["loop"]
    progress = state.progress
    for told in (RUN, "running", f"step {progress.step}", f"weights {progress.announced}", "/min", "tokens/s",
                 "bucket 3", "worker-5", "% busy", "1 step", "within ×1.5", "arithmetic/", "joined"):  # fmt: skip
        assert told in loop + seen["events"], told
    assert "now " in loop
    assert "trainer's busy share" in seen["curves"]
    assert "predicted" in seen["lengths"]
    assert seen["workers"].count("worker-") == 12
    assert "predicted" in seen["trajectories"]
    assert "worker-0 joined: vllm, 12 at once" in seen["events"]


@pytest.mark.parametrize("size", SIZES)
async def test_nothing_overlaps_in_any_size(size: tuple[int, int], run: MadeUpState) -> None:
    async with shown(run, size) as (app, pilot):
        for number in range(1, len(TABS) + 1):
            await pilot.press(str(number))
            await pilot.pause()
            pane = app.tabs.active_pane
            assert pane is not None
            regions = [each.region for each in pane.query(".panel") if each.display]
            assert regions
            for index, region in enumerate(regions):
                assert region.right <= size[0], TABS[number - 1]
                assert region.bottom <= size[1] - 1, TABS[number - 1]
                assert region.width >= 12, TABS[number - 1]
                assert region.height >= 4, TABS[number - 1]
                assert not any(region.overlaps(other) for other in regions[index + 1 :]), TABS[number - 1]


async def test_a_terminal_that_is_made_smaller_and_larger_keeps_its_order(run: MadeUpState) -> None:
    async with shown(run, (160, 50)) as (app, pilot):
        assert "predicted × actual" in text_of(app)
        await pilot.resize_terminal(80, 24)
        await pilot.pause(0.1)
        assert "predicted × actual" not in text_of(app)
        assert "▶" in text_of(app)
        await pilot.resize_terminal(20, 5)
        await pilot.pause(0.1)
        await pilot.resize_terminal(160, 50)
        await pilot.pause(0.1)
        assert "predicted × actual" in text_of(app)


async def test_a_run_without_any_data_is_shown() -> None:
    empty = MadeUpState(1.0)
    empty.state = RunState(RUN, parts=run_parts(RUN))
    async with shown(empty, (80, 24)) as (app, pilot):
        for number in range(1, len(TABS) + 1):
            await pilot.press(str(number))
            await pilot.pause()
        await pilot.press("5", "enter", "down", "1")
        await pilot.pause()
        assert "starting" in text_of(app)
        assert "no step yet" in text_of(app)


async def test_space_holds_the_display_and_lets_it_go_on() -> None:
    run = MadeUpState(25.0)
    async with shown(run) as (app, pilot):
        await pilot.press("space")
        before = run.state.progress.step
        run.go_on(20.0)
        await pilot.pause(0.6)
        assert run.state.progress.step > before
        assert f"step {before} " in text_of(app)
        assert "paused" in text_of(app)
        await pilot.press("space")
        await pilot.pause(0.1)
        assert f"step {run.state.progress.step} " in text_of(app)
        assert "paused" not in text_of(app)


async def test_arrows_go_round_the_tabs(run: MadeUpState) -> None:
    async with shown(run) as (app, pilot):
        visited = [app.tabs.active]
        for _ in TABS:
            await pilot.press("right")
            visited.append(app.tabs.active)
        await pilot.press("left")
        assert visited == [f"{tab}-tab" for tab in (*TABS, TABS[0])]
        assert app.tabs.active == f"{TABS[-1]}-tab"


async def test_help_is_shown_and_any_key_closes_it(run: MadeUpState) -> None:
    async with shown(run, (80, 24)) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, Help)
        assert "quit; the run continues" in text_of(app)
        await pilot.press("x")
        await pilot.pause()
        assert not isinstance(app.screen, Help)


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("ctrl+c", INTERRUPTED)])
async def test_a_key_leaves(key: str, code: int, run: MadeUpState) -> None:
    app = TopApp(run.state, run.read, RUN, run.clock)
    async with app.run_test() as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running
    assert app.return_code == code


async def test_a_chosen_trajectory_is_read_whole_and_the_list_stops_moving() -> None:
    run = MadeUpState(25.0)
    async with shown(run) as (app, pilot):
        await pilot.press("5")
        await pilot.pause(0.1)
        listing = app.listing
        place = listing.rows[2]["place"]
        await pilot.press("down", "down", "enter")
        await pilot.pause(0.2)
        assert run.reads == [place]
        told = text_of(app)
        for each in ("rewards", "correct", "format", "weights by token", "Think step by step", "Let me work through"):
            assert each in told, each
        run.go_on(5.0)
        app.render_everything()
        assert listing.rows[2]["place"] == place
        assert "held" in str(listing.query_one("#listed").border_title)
        await pilot.press("f")
        await pilot.pause(0.1)
        assert listing.rows[2]["place"] != place


async def test_a_record_that_is_gone_is_said_in_the_detail() -> None:
    run = MadeUpState(25.0)
    async with shown(run) as (app, pilot):
        await pilot.press("5")
        await pilot.pause(0.1)
        for partition in run.bus.log(f"{RUN}.trajectories").partitions:
            partition.clear()
        await pilot.press("enter")
        await pilot.pause(0.2)
        assert "found none" in str(app.query_one("#content", Static).content)


async def test_only_visible_panels_are_drawn(run: MadeUpState, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(name: str, section: Section) -> Section:
        def drawn(now: float) -> object:
            asked.append(name)
            return section(now)

        return drawn

    def counting(state: RunState) -> dict[str, Section]:
        return {name: counted(name, section) for name, section in snapshot.sections_of(state).items()}

    monkeypatch.setattr(screen, "sections_of", counting)
    async with shown(run) as (app, pilot):
        await pilot.press("4")
        await pilot.pause()
        asked.clear()
        app.render_everything()
        assert set(asked) == {"loop", "workers", *feature_sections(), "split"}
        assert "timeline" not in asked


async def test_unchanged_panels_are_not_drawn_again(run: MadeUpState) -> None:
    async with shown(run) as (app, pilot):
        await pilot.pause(0.1)
        panels = [*app.query(Panel)]
        assert not any(panel.show(app.sections) for panel in panels if panel.shown)
        app.sections["loop"] = {**app.sections["loop"], "step": 999}
        assert [panel.id for panel in panels if panel.shown and panel.show(app.sections)] == ["head", "loop"]


async def test_redraws_are_bounded_at_a_thousand_trajectories_a_second() -> None:
    run = MadeUpState(3.0, workers=16, slots=32, speed=7.0, per_step=512, train_s=0.3)
    async with shown(run) as (app, pilot):
        first, clock = app.ticks, asyncio.get_running_loop().time
        began = clock()
        before = run.state.processes.rates["sampled"].total
        while (took := clock() - began) < 1.5 or (
            run.state.processes.rates["sampled"].total - before <= 1000 and took < 20
        ):
            run.go_on(0.05)
            await pilot.pause(0.02)
        assert run.state.processes.rates["sampled"].total - before > 1000
        assert app.ticks - first <= (clock() - began) / OFTEN_S + 2
