// Hosts, their devices, and what lies on each.
function clusterPicture(place, picture) {
  const mesh = picture.mesh;
  const around = html("div", "cluster", place);
  around.dataset.chart = "cluster";
  const small = picture.world > 128;
  const legend = html("ul", "holds", place);
  for (let host = 0; host * picture.devices_per_host < picture.world; host += 1) {
    const box = html("div", "host", around);
    html("span", "", box, `host ${host}`);
    const grid = html("div", "devices", box);
    const first = host * picture.devices_per_host;
    const count = Math.min(picture.devices_per_host, picture.world - first);
    grid.style.gridTemplateColumns = `repeat(${Math.min(count, small ? 8 : 4)}, auto)`;
    for (let rank = first; rank < first + count; rank += 1) {
      const at = coordinates(rank, mesh);
      const device = html("div", "device" + (small ? " small" : ""), grid);
      device.style.background = STAGES[at.pp % STAGES.length];
      html("b", "", device, "rank " + rank);
      device.append(Object.keys(at).filter((axis) => mesh[axis] > 1).map((axis) => axis + at[axis]).join(" ") || "all");
      const holds = picture.holds[at.pp];
      const words = () => `rank ${rank} on host ${host}, ${picture.device}\n${Object.entries(at).map(([axis, value]) => `${axis} ${value} of ${mesh[axis]}`).join(", ")}\n${holds}\n${picture.shares}`;
      for (const name of ["pointermove", "pointerdown"]) device.addEventListener(name, (event) => tip(event, words()));
      device.addEventListener("pointerleave", (event) => tip(event, ""));
    }
  }
  clusterLegend(legend, picture);
}

// Which stage is which colour, what it holds, and what part of it a device has.
function clusterLegend(legend, picture) {
  picture.holds.forEach((holds, coordinate) => {
    const item = html("li", "", legend);
    if (picture.mesh.pp > 1) html("i", "", item).style.background = STAGES[coordinate % STAGES.length];
    item.append((picture.mesh.pp > 1 ? `pp ${coordinate}: ` : "each device: ") + holds.replaceAll("\n", "; "));
  });
  html("li", "", legend, "of that: " + picture.shares.replaceAll("\n", "; "));
}

function coordinates(rank, mesh) {
  const tp = rank % mesh.tp, outer = Math.floor(rank / mesh.tp);
  const cp = outer % mesh.cp, rest = Math.floor(outer / mesh.cp);
  return { pp: Math.floor(rest / mesh.dp), dp: rest % mesh.dp, cp, tp };
}
