//! Curves as a picture.

use std::fmt::Write as _;

/// What a height means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Shares of one, drawn from nothing to all.
    Share,
    /// Seconds, drawn from nothing to the most there are.
    Seconds,
}

/// A line through its points.
#[derive(Debug)]
pub(crate) struct Curve {
    pub(crate) name: &'static str,
    /// Places to the right, 0 to 1, and heights.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Curves over one axis.
#[derive(Debug)]
pub(crate) struct Chart {
    /// What the axis to the right counts.
    pub(crate) axis: &'static str,
    /// Marks on that axis.
    pub(crate) ticks: Vec<(f64, String)>,
    pub(crate) unit: Unit,
    pub(crate) curves: Vec<Curve>,
}

const COLOURS: [&str; 4] = ["#888888", "#1f6fb4", "#c0392b", "#2e8b57"];
const HEIGHT: usize = 400;

/// A picture of charts, one below the other.
pub(crate) fn draw(charts: &[Chart]) -> String {
    let height = HEIGHT * charts.len();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"640\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"640\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (i, chart) in charts.iter().enumerate() {
        let _ = writeln!(svg, "<g transform=\"translate(0 {})\">", i * HEIGHT);
        one(&mut svg, chart);
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    svg
}

fn one(svg: &mut String, chart: &Chart) {
    let heights = chart.curves.iter().flat_map(|c| &c.points).map(|p| p.1);
    let top = match chart.unit {
        Unit::Share => 1.0,
        Unit::Seconds => round_up(heights.fold(0.0, f64::max)),
    };
    let (x, y) = (|place: f64| 60.0 + 520.0 * place, |height: f64| 340.0 - 300.0 * height / top);
    for fifth in 0..=5 {
        let value = top * f64::from(fifth) / 5.0;
        let at = y(value);
        let label = match chart.unit {
            Unit::Share => format!("{:.0} %", 100.0 * value),
            Unit::Seconds => format!("{} s", (value * 1e6).round() / 1e6),
        };
        let _ = writeln!(svg, "<line x1=\"60\" x2=\"580\" y1=\"{at}\" y2=\"{at}\" stroke=\"#dddddd\"/>");
        let _ = writeln!(svg, "<text x=\"52\" y=\"{}\" text-anchor=\"end\">{label}</text>", at + 4.0);
    }
    for (i, (curve, colour)) in chart.curves.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let points: Vec<String> = curve.points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.join(" ")
        );
        // A line of one point is none.
        for point in &curve.points {
            let _ =
                writeln!(svg, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>", x(point.0), y(point.1));
        }
        let _ = writeln!(svg, "<text x=\"{}\" y=\"24\" fill=\"{colour}\">{}</text>", 70 + 150 * i, curve.name);
    }
    for (place, label) in &chart.ticks {
        let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"358\" text-anchor=\"middle\">{label}</text>", x(*place));
    }
    let _ = writeln!(svg, "<text x=\"320\" y=\"384\" text-anchor=\"middle\">{}</text>", chart.axis);
}

/// The next of 1, 2 and 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    if !(value.is_finite() && value > 0.0) {
        return 1.0;
    }
    let mut unit = 1.0;
    while unit > value {
        unit /= 10.0;
    }
    while unit * 10.0 <= value {
        unit *= 10.0;
    }
    [1.0, 2.0, 5.0].map(|n| n * unit).into_iter().find(|&n| n >= value).unwrap_or(10.0 * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heights_are_rounded_up_to_what_people_count_by() {
        for (value, top) in [(0.0, 1.0), (f64::NAN, 1.0), (1.0, 1.0), (1.1, 2.0), (7.0, 10.0), (430.0, 500.0)] {
            assert!((round_up(value) - top).abs() < 1e-9, "{value}");
        }
        assert!((round_up(0.03) - 0.05).abs() < 1e-9);
    }

    #[test]
    fn a_picture_has_its_curves_and_marks() {
        let chart = |unit| Chart {
            axis: "memory",
            ticks: vec![(0.0, "2 GB".into()), (1.0, "4 GB".into())],
            unit,
            curves: vec![Curve { name: "one", points: vec![(0.0, 0.5), (1.0, 0.25)] }],
        };
        let svg = draw(&[chart(Unit::Share), chart(Unit::Seconds)]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("points=\"60.0,190.0 580.0,265.0\"") && svg.contains("points=\"60.0,40.0 580.0,190.0\""));
        for part in ["2 GB", "4 GB", "60 %", "0.5 s", "translate(0 400)"] {
            assert!(svg.contains(part), "{part}");
        }
    }
}
