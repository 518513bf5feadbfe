"""Notebook 06 in JupyterLab: select runs, a view, a layer, a head group and a step, and check that the figures change."""

import re
from hashlib import sha256
from pathlib import Path

import pytest
from notebook_page import (
    find_control,
    find_visible,
    list_image_sources,
    list_options,
    list_selected,
    open_notebook,
    read_explorer_text,
    run_all_cells,
    save_screenshot,
    select_options,
    wait_until,
    wait_until_idle,
    wait_until_stable,
)

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory, lifecycle, resolve

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

HOME, RIGHT = "\ue011", "\ue014"  # selenium's codes of the keys
STEPS = 60
FETCH = """const done = arguments[1];
fetch(arguments[0].src).then(answer => answer.arrayBuffer()).then(bytes => done(Array.from(new Uint8Array(bytes))));"""


@pytest.fixture
def runs(project, tmp_path):
    """Train a run, its dense baseline and one with another seed, and set up a notebook 06 that starts with the first."""
    outputs, run_dirs = tmp_path / "runs", []
    for changes in ({}, {"model.attention": "dense", "name": "ci_dense"}, {"train.seed": 7, "name": "ci_seed7"}):
        config = RunConfig.from_yaml(resolve.find_params_file("ci"), {"train.steps": STEPS, **changes})
        run_dirs.append(lifecycle.ensure(config, outputs))
        assert lifecycle.wait(run_dirs[-1], 120) and lifecycle.get_state(run_dirs[-1]) == "DONE"
    set_parameters(project, outputs, run_dirs[0])
    return [run.name for run in run_dirs]


def set_parameters(project, outputs, run_dir) -> None:
    """Set these parameters in notebook 06."""
    source = project / "notebooks" / "06_health_analysis.py"
    text = source.read_text()
    for name, value in {"run_dir: str": str(run_dir), "other_run: str": "", "outputs: str": str(outputs)}.items():
        text, edited = re.subn(
            rf"^{name} = .*?  #", lambda found, name=name, value=value: f"{name} = {value!r}  #", text, flags=re.MULTILINE
        )
        assert edited == 1, name
    source.write_text(text)


@pytest.fixture
def make_run_dir(request, project):
    """Return the newest run of `make run` in the folder of --made, and set up notebook 06 with it."""
    folder = request.config.getoption("--made")
    if folder is None:
        pytest.skip("--made OUTPUTS names a folder in which `make run` has trained")
    run_dir = resolve.list_run_dirs(Path(folder).resolve())[-1]
    set_parameters(project, run_dir.parent, run_dir)
    return run_dir


def test_explorer_after_make_run(browser, make_run_dir, lab, screenshots):
    config = RunConfig.from_yaml(make_run_dir / directory.CONFIG)
    open_notebook(browser, lab, "06_health_analysis")
    run_all_cells(browser)
    wait_until(lambda: find_visible(browser, ".widget-image"), "the explorer has its picture", 240)
    wait_until_idle()
    assert list_selected(browser, "runs") == [make_run_dir.name]
    assert list_options(browser, "layer") == [str(layer) for layer in range(config.model.n_layers)]
    assert columns(browser, "step") == [str(config.train.steps)]
    save_screenshot(browser, find_control(browser, "runs"), screenshots, "run_explorer_after_make_run.png")


def test_selecting_runs_layers_groups_and_steps(browser, runs, lab, screenshots):
    first, dense, other = runs
    open_notebook(browser, lab, "06_health_analysis")
    run_all_cells(browser)
    wait_until(lambda: find_visible(browser, ".widget-image"), "the explorer has its picture", 240)
    wait_until_idle()
    assert list_selected(browser, "runs") == [first] and set(list_options(browser, "runs")) == set(runs)
    assert columns(browser, "step") == [str(STEPS)]

    # Another layer has other gates, in the figure and in the numbers.
    before, gates = pictures(browser), columns(browser, "gate share, compressed")
    select_options(browser, "layer", "1")
    assert pictures(browser) != before and columns(browser, "gate share, compressed") != gates

    # Another view.
    before = pictures(browser)
    select_options(browser, "view", "blocks shared with the previous query")
    assert pictures(browser) != before

    # Two runs, then three.
    before = pictures(browser)
    select_options(browser, "runs", first, other)
    assert pictures(browser) != before and len(columns(browser, "gate entropy, nats")) == 2
    before = pictures(browser)
    select_options(browser, "view", "loss")
    select_options(browser, "runs", first, dense, other)
    assert pictures(browser) != before
    assert "–" in columns(browser, "gate entropy, nats") and len(columns(browser, "validation, bits per byte")) == 3

    # The blocks of a head group, by the checkpoint nearest to a step.
    select_options(browser, "view", "blocks selected")
    assert len(pictures(browser)) == 2 and f"no map: {dense}: a dense model selects no blocks" in read_explorer_text(
        browser
    )
    select_options(browser, "runs", first, other)
    before = pictures(browser)
    select_options(browser, "head group", "1")
    assert all(a != b for a, b in zip(pictures(browser), before, strict=True))
    before = pictures(browser)
    move(browser, HOME)
    assert columns(browser, "step") == ["–", "–"]
    assert all(a != b for a, b in zip(pictures(browser), before, strict=True))

    select_options(browser, "view", "gate shares")
    before = pictures(browser)
    move(browser, RIGHT * (STEPS // 2))
    assert columns(browser, "step") == [str(STEPS // 2)] * 2 and pictures(browser) != before
    save_screenshot(browser, find_control(browser, "runs"), screenshots, "run_explorer.png")


def move(browser, keys: str) -> None:
    """Press keys on the step slider, and wait until the kernel has responded."""
    slider = find_visible(browser, ".widget-slider .noUi-handle")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", slider)
    slider.click()
    slider.send_keys(keys)
    wait_until_stable(lambda: (read_explorer_text(browser), list_image_sources(browser)))


def columns(browser, row: str) -> list[str]:
    """Return the numbers of a row, one per run."""
    line = next(line for line in read_explorer_text(browser).splitlines() if line.startswith(row))
    return line.partition("│")[2].split()


def pictures(browser) -> list[str]:
    """Return the hash of the bytes of each visible picture."""
    shown_now = browser.find_elements("css selector", ".widget-image")
    return [sha256(bytes(browser.execute_async_script(FETCH, picture))).hexdigest() for picture in shown_now]
