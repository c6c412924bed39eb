# A fleet of the installed packages: broker, aggregator and three devices as their services' users; one run to its end.
set -eu
as() { user=$1; shift; runuser -u "$user" -- "$@"; }
unit() { sed -n 's/^ExecStart=//p' "/lib/systemd/system/$1.service"; }
server=/var/lib/shoal-aggregator edge=/var/lib/shoal-edge
mosquitto -d -p 1883
mkdir /root/o
cd /root/o
shoal-fleet init owner --name reef --broker mqtt://127.0.0.1:1883
OWNER=$(shoal-fleet show owner | sed -n 's/^owner //p')
as shoal-aggregator shoal-aggregator init $server
shoal-fleet add-aggregator owner $server/aggregator.card
install -o shoal-aggregator -m 600 owner/grants/aggregator.grant $server/
as shoal-aggregator shoal-aggregator join $server $server/aggregator.grant --owner "$OWNER"
for d in dev-1 dev-2; do
    install -d -o shoal-edge -g shoal-edge -m 700 /srv/$d
    as shoal-edge shoal-edge init /srv/$d --name $d
    shoal-fleet add-device owner /srv/$d/$d.card
    install -o shoal-edge -m 600 owner/grants/$d.grant /srv/$d/
    as shoal-edge shoal-edge join /srv/$d /srv/$d/$d.grant --owner "$OWNER"
done
install -o shoal-aggregator -m 600 owner/roster.signed $server/
as shoal-aggregator $(unit shoal-aggregator) > /tmp/aggregator.log 2>&1 &
shoal-fleet invite owner > /tmp/line
as shoal-edge shoal-edge enrol $edge - --name dev-3 < /tmp/line > /tmp/enrol.log 2>&1 &
enrolling=$!
until shoal-fleet approve owner --all-invited; do sleep 1; done
wait $enrolling || { cat /tmp/enrol.log; exit 1; }
shoal-fleet publish owner
/opt/shoal-edge/bin/python3 - <<'END'
import numpy as np
draws = np.random.default_rng(1)
for name in ("dev-1", "dev-2", "dev-3"):
    x = draws.normal(size=(100, 4)).astype(np.float32)
    np.savez(f"/srv/{name}.npz", x=x, y=(x.sum(1) > 0).astype(np.int64))
END
shoal-fleet task compile owner logistic --option inputs=4 --option classes=2 --out task
for d in dev-1 dev-2; do
    as shoal-edge shoal-edge run /srv/$d --data /srv/$d.npz > /tmp/$d.log 2>&1 &
done
SHOAL_EDGE_DATA=/srv/dev-3.npz as shoal-edge $(unit shoal-edge) > /tmp/dev-3.log 2>&1 &
shoal-fleet run start owner --task task --algorithm fedavg --rounds 3
until as shoal-aggregator shoal-aggregator status $server --json | grep -q '"finished": true'; do sleep 1; done
sleep 3
as shoal-edge shoal-edge status $edge --check
as shoal-aggregator shoal-aggregator status $server --check
as shoal-edge shoal-edge doctor $edge --data /srv/dev-3.npz
as shoal-aggregator shoal-aggregator doctor $server
as shoal-edge shoal-edge evaluate $edge /srv/dev-3.npz
echo "the fleet has trained"
