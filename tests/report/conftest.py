def pytest_configure(config):
    config.addinivalue_line("markers", "browser: needs chromium; `make test-all` installs it and runs these")
