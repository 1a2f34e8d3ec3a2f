"use strict";
// uPlot ends a selection at the plot's edge when the pointer leaves it, also upwards or downwards, or when the page moves
// under it. These listeners (options.cursor.bind) follow the pointer until the button is released. `more` has the app's own:
// mousedown, which returns true where it has taken the event, and dblclick.
uPlot.followDrag = (more = {}) => {
  const states = new WeakMap(); // by plot, since several may share their options
  const find = plot => states.get(plot) ?? states.set(plot, {}).get(plot);
  const start = (plot, handle, event) => {
    if (event.button !== 0) return;
    handle(event);
    const state = find(plot);
    state.follow = next => { if (!plot.over.contains(next.target)) state.move(next); };
    document.addEventListener("mousemove", state.follow);
    const end = last => {
      document.removeEventListener("mousemove", state.follow);
      state.follow = null;
      if (!plot.over.contains(last.target)) state.leave(last);
    };
    // after uPlot's own listener, which takes the selection
    document.addEventListener("mouseup", last => setTimeout(() => end(last)), {once: true});
  };
  return {
    mousedown: (plot, _, handle) => event => { if (!more.mousedown?.(event)) start(plot, handle, event); },
    mousemove: (plot, _, handle) => find(plot).move = handle,
    mouseleave: (plot, _, handle) => {
      find(plot).leave = handle;
      return event => { if (!find(plot).follow) handle(event); };
    },
    ...(more.dblclick ? {dblclick: () => () => { more.dblclick(); }} : {}),
  };
};
