"""Options of the browser tests."""


def pytest_addoption(parser):
    parser.addoption("--screenshots", metavar="DIR", help="browser tests: keep their pictures in this folder")
