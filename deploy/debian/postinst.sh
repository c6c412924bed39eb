#!/bin/sh
# Makes the service's user and its directory. The service is neither enabled nor started: it has to join a fleet first.
set -e
if [ "$1" = configure ]; then
    if ! getent passwd @PROGRAM@ >/dev/null; then
        adduser --system --group --home /var/lib/@PROGRAM@ --no-create-home --quiet @PROGRAM@
    fi
    install -d -o @PROGRAM@ -g @PROGRAM@ -m 0700 /var/lib/@PROGRAM@
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload
        # After an upgrade the running program is that of the version before.
        if [ -n "$2" ]; then systemctl try-restart @PROGRAM@.service || true; fi
    fi
fi
