import { h, show } from "./dom.js";
show(h("h1", {}, "What the noise does"));
