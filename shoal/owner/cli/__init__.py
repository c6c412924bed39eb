"""Command line of `shoal-fleet`.

- `main` has init, show, add-device, add-aggregator, renew, task compile and run; `enrolment` has the commands that need
  the broker: token, devices, approve, revoke, rotate, publish and broker-config.
- A command parses its options and calls one function of `shoal.owner`; slow imports happen inside the command, so that
  ``shoal-fleet --help`` loads neither numpy nor torch.
- Results go to stdout, one a line; the next step to take and warnings go to stderr.

Example: ``shoal-fleet show DIR --json`` prints one object with fleet, roster, devices and runs.
"""
