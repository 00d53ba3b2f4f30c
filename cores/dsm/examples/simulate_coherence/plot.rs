//! A bar chart as SVG: a group of bars per pattern, a bar per preset, on a logarithmic scale.

use std::fmt::Write;

/// One bar.
pub struct Bar {
    /// The label of the bar's group.
    pub group: String,
    /// The name of the series, which selects the color.
    pub series: String,
    /// The height, in the chart's unit. A bar of 0 isn't drawn.
    pub value: f64,
}

const WIDTH: f64 = 900.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 90.0;
const BAR: f64 = 14.0;
const GAP: f64 = 14.0;
const COLOURS: [&str; 6] = ["#1b6ca8", "#e07b39", "#5a9367", "#9b5094", "#666666", "#b5a000"];

/// Draws `bars` as an SVG document under `title`. Bars of one group must be consecutive.
pub fn bars(title: &str, bars: &[Bar]) -> String {
    let mut series: Vec<&str> = Vec::new();
    for bar in bars {
        if !series.contains(&bar.series.as_str()) {
            series.push(&bar.series);
        }
    }
    let values = bars.iter().map(|bar| bar.value).filter(|value| *value > 0.0);
    let (low, high) = values.fold((f64::MAX, 1.0f64), |(low, high), value| (low.min(value), high.max(value)));
    let (low, high) = (low.min(high).log10().floor(), high.log10().ceil());
    let scale = |value: f64| LEFT + (value.log10() - low) / (high - low).max(1.0) * (WIDTH - LEFT - RIGHT);
    let mut body = String::new();
    let mut y = 60.0;
    let mut group = "";
    for bar in bars {
        if bar.group != group {
            y += GAP;
            group = &bar.group;
            let _ = writeln!(
                body,
                r#"<text x="{}" y="{:.1}" text-anchor="end">{group}</text>"#,
                LEFT - 8.0,
                y + BAR - 3.0
            );
        }
        let colour = COLOURS[series.iter().position(|name| *name == bar.series).unwrap_or(0) % COLOURS.len()];
        let end = if bar.value > 0.0 { scale(bar.value) } else { LEFT };
        let _ = writeln!(
            body,
            r#"<rect x="{LEFT}" y="{y:.1}" width="{:.1}" height="{:.1}" fill="{colour}"/><text x="{:.1}" y="{:.1}">{:.1}</text>"#,
            (end - LEFT).max(0.0),
            BAR - 2.0,
            end + 4.0,
            y + BAR - 3.0,
            bar.value
        );
        y += BAR;
    }
    for (index, name) in series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let x = format!("{:.1}", LEFT + 140.0 * f64::from(u8::try_from(index).unwrap_or(0)));
        let _ = writeln!(body, r#"<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>"#);
        let _ = writeln!(body, r#"<text x="{x}" y="46" dx="18">{name}</text>"#);
    }
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{:.0}" font-family="sans-serif" font-size="11">
<rect width="100%" height="100%" fill="white"/>
<text x="10" y="20" font-size="14">{title}</text>
{body}</svg>
"#,
        y + 20.0
    )
}
