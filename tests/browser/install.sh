#!/usr/bin/env bash
# A browser for tests/observe/test_report_browser.py: Debian's Chromium. Needs root and apt-get.
# Exit status 0: it is there. 3: it cannot be installed here; the reason is printed.
set -u

if command -v chromium > /dev/null; then
    echo "browser: there: $(chromium --version 2> /dev/null)"
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "browser: NOT INSTALLED: this needs root (sudo tests/browser/install.sh)"
    exit 3
fi
if ! command -v apt-get > /dev/null; then
    echo "browser: NOT INSTALLED: there is no apt-get; install chromium in this system's own way"
    exit 3
fi
export DEBIAN_FRONTEND=noninteractive
timeout 60 apt-get update -qq || echo "browser: apt-get update failed; what is known is tried"
if ! timeout 240 apt-get install -y -qq --no-install-recommends chromium > /dev/null; then
    echo "browser: NOT INSTALLED: apt-get install chromium failed"
    exit 3
fi
echo "browser: installed: $(chromium --version 2> /dev/null)"
