#!/bin/sh
# `remove` keeps keys and state, `purge` erases them, unless the other package of this program has taken its place.
set -e
if [ "$1" = purge ] && [ ! -e /usr/bin/@PROGRAM@ ]; then
    rm -rf /var/lib/@PROGRAM@
    if getent passwd @PROGRAM@ >/dev/null && command -v deluser >/dev/null; then
        deluser --system --quiet @PROGRAM@
    fi
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
