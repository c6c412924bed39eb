# A fleet of the installed packages, whose aggregator and first device are services; a run of many rounds begins.
set -eu
as() { user=$1; shift; runuser -u "$user" -- "$@"; }
server=/var/lib/shoal-aggregator edge=/var/lib/shoal-edge
mkdir /root/o
cd /root/o
shoal-fleet init owner --name reef --broker mqtt://127.0.0.1:1883
OWNER=$(shoal-fleet show owner | sed -n 's/^owner //p')
as shoal-aggregator shoal-aggregator init $server
shoal-fleet add-aggregator owner $server/aggregator.card
install -o shoal-aggregator -m 600 owner/grants/aggregator.grant $server/
as shoal-aggregator shoal-aggregator join $server $server/aggregator.grant --owner "$OWNER"
for d in dev-1 dev-2 dev-3; do
    place=/srv/$d
    if [ $d = dev-1 ]; then place=$edge; else install -d -o shoal-edge -g shoal-edge -m 700 $place; fi
    as shoal-edge shoal-edge init $place --name $d
    shoal-fleet add-device owner $place/$d.card
    install -o shoal-edge -m 600 owner/grants/$d.grant $place/
    as shoal-edge shoal-edge join $place $place/$d.grant --owner "$OWNER"
done
/opt/shoal-edge/bin/python3 - <<'END'
import numpy as np
draws = np.random.default_rng(1)
for name in ("dev-1", "dev-2", "dev-3"):
    x = draws.normal(size=(100, 4)).astype(np.float32)
    np.savez(f"/srv/{name}.npz", x=x, y=(x.sum(1) > 0).astype(np.int64))
END
echo SHOAL_EDGE_DATA=/srv/dev-1.npz >> /etc/shoal/edge.env
systemctl enable --now shoal-aggregator shoal-edge
shoal-fleet publish owner
for d in dev-2 dev-3; do
    systemd-run --quiet --unit=$d --uid=shoal-edge shoal-edge run /srv/$d --data /srv/$d.npz
done
shoal-fleet task compile owner logistic --option inputs=4 --option classes=2 --out task
shoal-fleet run start owner --task task --algorithm fedavg --rounds 50000
