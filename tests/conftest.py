"""What every test shares: the switch that turns skips into failures, and tests that come out the same every time."""

import os

import pytest
from hypothesis import settings

# Generated cases are the same in every run, so that a red run can be repeated and a green one stays green.
# `pytest --hypothesis-profile explore` looks for new ones.
settings.register_profile("course", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("course")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("COURSE_NO_SKIP"):
        # A plugin, not a hook of this file: it has to hear of notebooks and doctests too, which lie elsewhere.
        config.pluginmanager.register(SkipsFail(), "course-skips-fail")


class SkipsFail:
    """With ``COURSE_NO_SKIP=1``, which CI sets, a test that is skipped has failed: there it has all it could need."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        return refuse_skip((yield))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector):
        return refuse_skip((yield))


def refuse_skip(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"COURSE_NO_SKIP is set, and this was skipped. {reason}"
    return report
