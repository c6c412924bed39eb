#!/bin/sh
# Make the keys, the data and the first run of compose.yaml's fleet in the folder fleet beside it. Needs the programs of
# `pip install 'shoal[all]'`, no broker and no container.
set -eu
cd "$(dirname "$0")"
if [ -e fleet ]; then
    echo "fleet is there already: remove it to make another" >&2
    exit 1
fi
umask 077
# The containers run as the user who owns these files.
echo "SHOAL_USER=$(id -u):$(id -g)" > .env
mkdir fleet
cd fleet
shoal-fleet init owner --name harbour --broker mqtt://broker:1883
OWNER=$(shoal-fleet show owner | sed -n 's/^owner //p')
shoal-aggregator init server
shoal-fleet add-aggregator owner server/aggregator.card
shoal-aggregator join server owner/grants/aggregator.grant --owner "$OWNER"
shoal-keeper init keeper --name keeper
shoal-fleet add-keeper owner keeper/keeper.card
shoal-keeper join keeper owner/grants/keeper.grant --owner "$OWNER"
for d in dev-1 dev-2 dev-3; do
    shoal-edge init $d --name $d
    shoal-fleet add-device owner $d/$d.card
    shoal-edge join $d owner/grants/$d.grant --owner "$OWNER"
    mkdir -p data/$d
done
cp owner/roster.signed server/
python3 - <<'END'
import numpy as np

draws = np.random.default_rng(1)
for name in ("dev-1", "dev-2", "dev-3"):
    x = draws.normal(size=(200, 4)).astype(np.float32)
    np.savez(f"data/{name}/samples.npz", x=x, y=(x.sum(1) > 0).astype(np.int64))
END
shoal-fleet task compile owner logistic --option inputs=4 --option classes=2 --out task
shoal-fleet run start owner --task task --algorithm fedavg --rounds 10 --keeper keeper --out server/runs/000001.run
