// The pictures. Colours are those of Okabe and Ito, which people with colour blindness can tell apart.

const MEMORY = {
  parameters: "#0072B2", gradients: "#D55E00", optimizer_state: "#009E73", activations: "#56B4E9", inputs: "#F0E442",
  gathered_parameters: "#CC79A7", communication_buffers: "#E69F00", temporaries: "#9AA0A6",
};
const WORK = {
  forward: "#56B4E9", recompute: "#CC79A7", backward: "#0072B2", backward_inputs: "#0072B2", backward_weights: "#009E73",
  update: "#E69F00", waiting: "#D55E00", other: "#C3C8CE", transfer: "#F0E442",
};
const AXES = { dp: "#AA4499", tp: "#E69F00", cp: "#009E73", ep: "#56B4E9", pp: "#9AA0A6" };
const RUNS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9AA0A6", "#F0E442"];
const DASHES = ["", "6 3", "2 3"];
const STAGES = ["#56B4E9", "#E69F00", "#5FC7A4", "#F0E442", "#E0A3C4", "#F08C4A", "#8FB8DE", "#C3C8CE"];
