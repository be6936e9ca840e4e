// Chooses the colour scheme before anything is drawn: the remembered one, else the system's.
(() => {
  try {
    const kept = localStorage.getItem("streamrl-theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch { /* storage may be forbidden; the system's scheme holds */ }
})();
