# The daily commands. `just` alone lists them.

lint_env := "uv run --all-packages --group lint"

_default:
    @just --list

# install everything that developing needs
setup:
    uv sync --all-packages --group lint

# run the tests; arguments go to pytest
test *args:
    uv run --all-packages pytest {{ args }}

# ruff, and whether the formatting is ruff's
lint:
    {{ lint_env }} ruff check
    {{ lint_env }} ruff format --check

# pyright, strict, over src
types:
    {{ lint_env }} pyright

# write ruff's fixes and formatting
fmt:
    {{ lint_env }} ruff check --fix
    {{ lint_env }} ruff format

# branch coverage of the core
coverage *args:
    uv run --all-packages coverage run -m pytest {{ args }}
    uv run --all-packages coverage report --skip-covered

# each adapter alone, with the lowest versions that it allows; `just floors langchain`
floors *args:
    uv run --all-packages python integration-tests/lanes.py floors {{ args }}

# each adapter alone, with the newest versions; a new release of a framework is heard of here first
newest *args:
    uv run --all-packages python integration-tests/lanes.py newest {{ args }}

# the three acts: book and pay, fail, die and recover
demo:
    uv run agent-saga demo

# the figures of docs/performance.md, beside a bare write and sync
bench *args:
    uv run --all-packages python -m benchmarks {{ args }}

# whole sagas on a schedule that a seed decides; `just simulate SEEDS=10000`, `just simulate --seed N`
simulate *args:
    uv run --all-packages python -m simulation {{ replace(args, "SEEDS=", "--seeds ") }}

# every loss of power, at length
power-loss *args:
    AGENT_SAGA_POWER_LOSS=600 uv run --all-packages pytest packages/agent-saga-core/tests/power_loss -s --timeout 1800 {{ args }}

# what CI runs
ci:
    .ci/run
