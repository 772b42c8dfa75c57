// The console: which view is shown, and what runs while it is open.
import "./theme.js";
import { listModels } from "./chat.js";
import { lookNow, watch } from "./live.js";

const views = ["chat", "engine"];

function show() {
  const asked = location.hash.slice(1);
  const view = views.includes(asked) ? asked : "chat";
  document.title = view === "engine" ? "Fornax: engine" : "Fornax";
  document.body.dataset.view = view;
  for (const name of views) document.getElementById(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  lookNow();
}

window.addEventListener("hashchange", show);
show();
watch(() => listModels().catch(() => {}));
