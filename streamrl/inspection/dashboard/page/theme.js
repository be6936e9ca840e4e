// Chooses the colour scheme before anything is drawn: the remembered one, else the system's. `data-theme` is the user's
// choice, `data-scheme` the resulting scheme. The style sheet uses only the second.
(() => {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  globalThis.settleScheme = () => { root.dataset.scheme = root.dataset.theme ?? (system.matches ? "dark" : "light"); };
  try {
    const kept = localStorage.getItem("streamrl-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch { /* storage may be forbidden: use the system's scheme */ }
  settleScheme();
  system.addEventListener("change", settleScheme);
})();
